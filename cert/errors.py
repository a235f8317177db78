"""The one exception of the library: input for which no probability sample or certificate exists."""


class CertError(ValueError):
    """Raised with one line: what was wrong, what was expected, where."""
