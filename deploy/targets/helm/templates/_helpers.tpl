{{- define "downpour.labels" -}}
app.kubernetes.io/name: downpour
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* The labels by which pods of one component are selected: (list $ "service") */}}
{{- define "downpour.selector" -}}
app.kubernetes.io/name: downpour
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "downpour.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "downpour.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 10001
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "downpour.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The environment of Ray's processes and of its drivers. */}}
{{- define "downpour.rayEnv" -}}
- {name: HOME, value: /tmp}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.ray.tokenSecretName }}, key: token}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- /* Ray lowers the priority of its processes: on a busy node every worker would wait for a shard. */}}
- {name: RAY_worker_niceness, value: "0"}
{{- if .Values.ray.tlsSecretName }}
- {name: RAY_USE_TLS, value: "1"}
- {name: RAY_TLS_SERVER_CERT, value: /etc/downpour/ray-tls/tls.crt}
- {name: RAY_TLS_SERVER_KEY, value: /etc/downpour/ray-tls/tls.key}
- {name: RAY_TLS_CA_CERT, value: /etc/downpour/ray-tls/ca.crt}
{{- end }}
{{- end }}

{{- define "downpour.rayTlsMount" -}}
{{- if .Values.ray.tlsSecretName }}
- {name: ray-tls, mountPath: /etc/downpour/ray-tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "downpour.rayTlsVolume" -}}
{{- if .Values.ray.tlsSecretName }}
- name: ray-tls
  secret: {secretName: {{ .Values.ray.tlsSecretName }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- /* A port or a range of a NetworkPolicy: 8600, or a map with first and last. */}}
{{- define "downpour.port" -}}
{{- if kindIs "map" . -}}
- {protocol: TCP, port: {{ int .first }}, endPort: {{ int .last }}}
{{- else -}}
- {protocol: TCP, port: {{ int . }}}
{{- end }}
{{- end }}
