{{- /* A pod of Ray: (list $ group port-that-shows-it-lives size-of-shm gpus) */}}
{{- define "downpour.rayPod" -}}
{{- $ := index . 0 }}{{- $group := index . 1 }}{{- $port := index . 2 }}{{- $gpus := index . 4 -}}
serviceAccountName: {{ $.Release.Name }}-ray
automountServiceAccountToken: false
securityContext: {{- include "downpour.podSecurity" $ | nindent 2 }}
{{- include "downpour.pullSecrets" $ }}
{{- with $group.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $group.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: ray
    image: {{ $.Values.images.shard }}
    imagePullPolicy: {{ $.Values.imagePullPolicy }}
    env: {{- include "downpour.rayEnv" $ | nindent 6 }}
    # Without probes of its own a pod gets KubeRay's, which need Ray's dashboard.
    readinessProbe:
      tcpSocket: {port: {{ $port }}}
      periodSeconds: 5
    livenessProbe:
      tcpSocket: {port: {{ $port }}}
      initialDelaySeconds: 30
      periodSeconds: 10
      failureThreshold: 12
    resources:
      {{- $resources := deepCopy $group.resources }}
      {{- if $gpus }}
      {{- $_ := set $resources.limits "nvidia.com/gpu" $gpus }}
      {{- $_ := set $resources.requests "nvidia.com/gpu" $gpus }}
      {{- end }}
      {{- toYaml $resources | nindent 6 }}
    securityContext: {{- include "downpour.containerSecurity" $ | nindent 6 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: shm, mountPath: /dev/shm}
      {{- include "downpour.rayTlsMount" $ | nindent 6 }}
volumes:
  - name: tmp
    emptyDir: {sizeLimit: 20Gi}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ index . 3 }}}
  {{- include "downpour.rayTlsVolume" $ | nindent 2 }}
{{- end }}
