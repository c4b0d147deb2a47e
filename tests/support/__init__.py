"""What tests of whole processes need: starting and ending them, and speaking to their doors as strangers would."""
