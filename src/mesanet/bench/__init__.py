"""Speed, always beside a peer that is measured in the same run."""
