# SPDX-License-Identifier: Apache-2.0
"""The same functions as Triton kernels, which need a CUDA device; not yet measured on one.

With ``TRITON_INTERPRET=1``, set before Triton is first imported, the kernels run on the CPU,
slowly, for tests.
"""
