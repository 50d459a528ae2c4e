#!/bin/sh
# Makes a base image of Debian 12 from the package mirror that apt uses here, as root, without a
# registry of images: make-base.sh NAME, then build with --build-arg BASE=localhost/NAME.
set -eu
name=${1:?expected the name of the image, such as downpour-base:12}
archive=$(mktemp --suffix .tar)
trap 'rm -f "$archive"' EXIT
mmdebstrap --variant=minbase --include=ca-certificates bookworm "$archive"
podman import "$archive" "localhost/$name"
