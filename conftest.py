"""Fixtures for the tests of the whole repository; pytest allows ``pytest_plugins`` only here."""

pytest_plugins = ["pytester"]
