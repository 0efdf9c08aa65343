"""What the tasks bfcl and bfcl_multiturn share: call syntax, matching, rewards, data, roles."""
