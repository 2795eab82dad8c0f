"""Stands in for torchvision: SGLang registers image processors while it imports, and transformers refuses without it.

The real one would have to be the very build that belongs to the installed torch. Only its presence is asked for.
"""

from inert import make_inert

make_inert(__name__, "0.28.0")
