"""Many mixers on the same data: trained, evaluated and reported by one command that goes on where it was stopped."""

from mesanet.compare.run import compare as compare
