# SPDX-License-Identifier: Apache-2.0
"""What drafts inside vLLM's model runners: ``v1`` and ``v2``."""
