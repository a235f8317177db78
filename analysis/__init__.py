"""Rows to verdicts, figures, tables: no torch, so any laptop judges."""
