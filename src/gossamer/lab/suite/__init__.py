"""The general suite: methods compared on problems of different kinds (`gossamer.lab.recipes.general`)."""

from gossamer.lab.suite.comparison import REPORTED, SuiteComparison, compare_suite, unstructured

__all__ = ["REPORTED", "SuiteComparison", "compare_suite", "unstructured"]
