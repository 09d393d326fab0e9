"""Settings of one model compared by speed, memory and error."""
