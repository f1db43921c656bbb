"""The verdict on reports: policy, findings, baseline, ratchet, and the forms in which they are told. No torch.

To read in this order:

``gate``: the pure function of reports, policy, baseline and day; it calls all that follows
``judged``, ``testjudged``: cells and tests judged again from the evidence that the report holds
``wholeness``, ``origin``: is all there, does it agree with itself, is it what the policy demands, and the run that is
to be released?
``policy``, ``policyfile``: what a release asks and what it lets pass, and the YAML file that says so
``allowances``, ``policy_limits``: the policy applied to failures and skips, and to numbers
``baseline``: what differs from an earlier run
``announcement``, ``markdown``, ``ci_formats``: the verdict told
``gate_command``: the command line, and a policy made stricter
"""
