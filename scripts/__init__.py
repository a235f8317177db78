"""Entry points: each module is one command, `python -m scripts.<name>`; make calls them."""
