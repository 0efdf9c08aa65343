"""Warnings as one line a user can read: without the line of code that Python shows under them."""

import warnings


def warn_in_one_line(script: str) -> None:
    """From here on, a plain warning is `<script>: warning: <text>`, as the command line's own; others keep their kind.

    Args:
        script: what the user started.
    """
    standard = warnings.formatwarning

    def formatted(message, category, filename, lineno, line=None) -> str:
        if category is UserWarning:
            return f"{script}: warning: {message}\n"
        return standard(message, category, filename, lineno, "")  # no text of that line

    warnings.formatwarning = formatted
