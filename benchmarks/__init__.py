"""Benchmarks, one folder per claim: the sweep as data, the run, and the analysis of its numbers."""
