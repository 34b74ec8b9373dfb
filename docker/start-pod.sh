#!/bin/sh
# Start sshd of a pod in the foreground: own host keys at the first start, keys of the operator only.
#
# PUBLIC_KEY holds the operator's public keys, one a line, as the providers of pods pass them. Without
# it ~/.ssh/authorized_keys must be mounted; a pod that nobody can enter refuses to start.
set -eu

keys=$HOME/.ssh/authorized_keys
mkdir -p "$HOME/.ssh"
chmod 700 "$HOME/.ssh"
if [ -n "${PUBLIC_KEY-}" ]; then
  printf '%s\n' "$PUBLIC_KEY" >"$keys"
  chmod 600 "$keys"
fi
if [ ! -s "$keys" ]; then
  echo "error: nobody could enter this pod, because it has no public key" >&2
  echo "hint: set PUBLIC_KEY, or mount $keys" >&2
  exit 2
fi

ssh-keygen -A # makes only the host keys that are missing
exec "$(command -v sshd)" -D -e
