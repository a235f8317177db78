"""The harness: cells, plans, replay and the store. It turns a composed configuration into rows.

Rooms: `errors` (what a user reads), `cells` (identity and plan), `schema` (columns of a row), `store` (the artifact),
`attempt`, `journal`, `files` (how it loses nothing), `provenance` (where rows come from), `registry` and `prereg`
(what is registered). None of these imports torch: stored rows are listed, counted and judged on any laptop.
"""
