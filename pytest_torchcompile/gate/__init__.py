"""The verdict on reports: policy, findings, baseline, ratchet, and the forms in which they are told. No torch."""
