"""From a YAML file to planned cells, with ``file:line:column`` for every mistake. Plain data, no torch."""
