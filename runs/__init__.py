"""The harness: cells, plans, replay and the store. It turns a composed configuration into rows.

Rooms: `errors` (what a user reads), `cells` (identity and plan), `schema` (columns of a row), `journal` (one attempt's lines), `store` (the artifact), `provenance`
(where rows came from), `prereg` (registered claims). None of these imports torch, so that stored rows can be listed, counted and judged on any laptop.
"""
