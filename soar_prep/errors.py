"""The one exception a user can cause."""


class UserError(Exception):
    """Something the user can mend: one line that names the thing, its value, what was expected and the remedy.

    The command line prints it and exits with code 2.
    """
