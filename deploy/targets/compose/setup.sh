#!/bin/sh
# Makes the secrets that compose.yaml names, each in a file of mode 600; leaves those that exist.
# The certificate is signed by itself: replace tls.crt and tls.key by those of your authority.
set -eu
umask 077
cd "$(dirname "$0")"
mkdir -p secrets
word() { openssl rand -hex 32; }
[ -e secrets/ray-token ] || word > secrets/ray-token
[ -e secrets/database-password ] || word > secrets/database-password
[ -e secrets/database-url ] || printf 'postgresql://downpour:%s@postgres/downpour\n' \
    "$(cat secrets/database-password)" > secrets/database-url
# Prometheus sends it; put a token of the role viewer there.
[ -e secrets/metrics-token ] || : > secrets/metrics-token
[ -e secrets/spark-defaults.conf ] || cat > secrets/spark-defaults.conf << END
spark.authenticate true
spark.authenticate.secret $(word)
spark.network.crypto.enabled true
spark.master.rest.enabled false
spark.ui.killEnabled false
spark.driver.port 7600
spark.blockManager.port 7700
spark.port.maxRetries 16
END
[ -e secrets/tls.key ] || openssl req -x509 -newkey rsa:3072 -nodes -days 365 \
    -subj /CN=service -addext subjectAltName=DNS:service,DNS:localhost,IP:127.0.0.1 \
    -keyout secrets/tls.key -out secrets/tls.crt 2> /dev/null
# Compose mounts the files as they are: they must be readable by the user of the containers.
if [ "$(id -u)" = 0 ]; then
    chown 10001:10001 secrets/*
    chown 999:999 secrets/database-password
    chown 65534:65534 secrets/metrics-token
    chmod 644 secrets/tls.crt
fi
