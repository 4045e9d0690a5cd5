"""Comparison of policies by trained loss, and of estimators with measured sensitivities."""
