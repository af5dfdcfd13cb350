"""The general suite: methods compared on problems of different kinds (`gossamer.lab.recipes.general`)."""

from gossamer.lab.suite.comparison import REPORTED, SuiteComparison, compare_suite, unstructured
from gossamer.lab.suite.tuning import Tuning, freeze, tune

__all__ = ["REPORTED", "SuiteComparison", "Tuning", "compare_suite", "freeze", "tune", "unstructured"]
