# SPDX-License-Identifier: Apache-2.0
"""Domino speculative decoding for unmodified vLLM.

Importing this package costs nothing: vLLM imports it in every process it starts.
"""

__version__ = "0.1.0"
