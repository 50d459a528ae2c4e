#!/bin/sh
# Makes a base image of Debian 12 from the package mirror that apt uses here, as root, without a
# registry of images: make-base.sh NAME, then build with --build-arg BASE=localhost/NAME. Further
# arguments are certificates (PEM) of authorities that your network has, such as a proxy's.
set -eu
name=${1:?expected the name of the image, such as downpour-base:12}
shift
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
trusted=$folder/trusted apt=$folder/apt
mkdir "$trusted" "$apt"
for certificate; do
    cp "$certificate" "$trusted/$(basename "$certificate" .pem).crt"
done
# As in Debian's own slim images: no manuals, no translations, and nothing that apt has cached.
cat > "$apt/no-caches" << 'END'
APT::Keep-Downloaded-Packages "false";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
END
# A system whose /usr is merged from the start needs no usrmerge, which brings 50 MB of Perl.
# shellcheck disable=SC2016 # mmdebstrap gives the hook the root folder of the system
mmdebstrap --variant=minbase --include=ca-certificates,usr-is-merged \
    --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --customize-hook="sync-in '$apt' /etc/apt/apt.conf.d" \
    --customize-hook="sync-in '$trusted' /usr/local/share/ca-certificates" \
    --customize-hook='chroot "$1" update-ca-certificates' \
    --customize-hook='rm -f "$1"/var/cache/apt/*.bin' \
    bookworm "$folder/base.tar"
podman import "$folder/base.tar" "localhost/$name"
