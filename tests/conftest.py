"""Hypothesis judges no test by its time: machines are busy."""

from hypothesis import HealthCheck, settings

settings.register_profile("tests", deadline=None,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.load_profile("tests")
