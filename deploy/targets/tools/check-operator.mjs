// Checks ServiceMonitors and PrometheusRules, a JSON array on standard input, by the schemas of the
// Prometheus operator. The argument is the folder node_modules that holds them.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const place = `${process.argv[2]}/@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/index.js`;
const models = await import(pathToFileURL(place));
for (const resource of JSON.parse(readFileSync(0, "utf8"))) {
  const { apiVersion, kind, ...rest } = resource;
  if (apiVersion !== "monitoring.coreos.com/v1" || !(kind in models)) {
    throw new Error(`unknown kind ${apiVersion} ${kind}`);
  }
  new models[kind](rest).validate();
}
