"""Ends the worker processes of distributed tests with the session."""

import workers


def pytest_sessionfinish() -> None:
    workers.close()
