"""The playbook: what a report says about compiling this repository's models, as Markdown to keep in it. No torch."""
