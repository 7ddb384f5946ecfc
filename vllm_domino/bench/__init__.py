# SPDX-License-Identifier: Apache-2.0
"""Measures drafting: ratios, side by side, in one run."""
