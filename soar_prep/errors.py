"""The two exceptions that are no programming mistake; the command line prints one line for each."""


class UserError(Exception):
    """Something the user can mend: names the thing, its value, what was expected and the remedy. Exit code 2."""


class CheckFailed(Exception):
    """A checkpoint or a kernel is not what it should be: broken, or worse than allowed. Exit code 3."""
