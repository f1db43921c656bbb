"""One cell in one rank: the runner, its subject, the environment, and the verdicts made of what was observed."""
