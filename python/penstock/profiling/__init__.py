"""Where the time of an iteration goes: what is recorded, how it is divided, and what that means (docs/design/profile.md)."""
