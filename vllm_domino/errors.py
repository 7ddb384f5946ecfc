# SPDX-License-Identifier: Apache-2.0
"""What we raise. Each message names what is wrong and what to do about it."""


class DominoError(ValueError):
    """Any refusal of ours; a ``ValueError``, as vLLM's own configuration errors are."""


class DraftConfigError(DominoError):
    """A draft's config.json, or the user's speculative config, cannot be used."""


class CheckpointError(DominoError):
    """A draft's weights are missing, unreadable or not what its config says."""


class IncompatibleVllmError(DominoError):
    """The installed vLLM does not have the seams that Domino enters by."""
