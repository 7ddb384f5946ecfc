# SPDX-License-Identifier: Apache-2.0
"""Training of Domino (and, for comparison, plain DFlash) drafts."""
