"""Tests of GRASP: one law or behaviour per test.

A tolerance follows from the arithmetic (dtype, number of terms, magnitude), not from one machine: `tests/rounding.py`.
A difference over a tenth of its tolerance needs a second look. To see another machine's numbers, run a test with
OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=default OPENBLAS_CORETYPE=Haswell MKL_ENABLE_INSTRUCTIONS=AVX2.
"""
