"""Measurements -> a fitted, judged, tracked, gated and registered model; reports.

Nothing is imported here: fitting needs scikit-learn and xgboost, tracking mlflow, reading a store pandas. Take what is
needed from its module: ``data``, ``evaluate``, ``metrics``, ``train``, ``registry``, ``tracking``, ``report``.
"""
