"""Errors that a user can act on: one line, no traceback, exit code 2."""


class UserError(ValueError):
    """Say what was wrong, what was expected and where; `scripts._cli.run` prints it as one line and exits 2."""
