"""What a measurement cannot go on with, as one sentence that a user can act on."""


class BenchError(Exception):
    """Something that is missing, broken or not comparable; the command line prints the sentence."""
