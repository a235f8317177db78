"""Errors that a user can act on: one line, no traceback, exit code 2."""


class UserError(ValueError):
    """Say what was wrong, what was expected and where; `scripts._cli.run` prints it as one line and exits 2."""


class UnusedDataError(UserError):
    """DATA= was given to a grid that has no use for it."""


def require(holds: bool, field: str, value: object, expected: str) -> None:
    """Raise UserError "field: value; expected ..." unless it holds."""
    if not holds:
        raise UserError(f"{field}: {value!r}; expected {expected}")
