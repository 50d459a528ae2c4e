{{- /* The Job of an attempt. The service adds its name, labels, the job's id and the attempt's nonce,
       and appends the job's folder and the file of its output to the arguments. */}}
{{- define "downpour.runnerJob" -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .Release.Name }}-runner
  namespace: {{ .Release.Namespace }}
  labels: {{- include "downpour.labels" . | nindent 4 }}
spec:
  backoffLimit: 0 # the service decides whether there is another attempt
  completions: 1
  parallelism: 1
  ttlSecondsAfterFinished: 86400
  template:
    metadata:
      labels: {{- include "downpour.selector" (list . "runner") | nindent 8 }}
      annotations:
        cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    spec:
      restartPolicy: Never
      serviceAccountName: {{ .Release.Name }}-runner
      automountServiceAccountToken: true
      terminationGracePeriodSeconds: {{ .Values.runner.stopSeconds }}
      securityContext: {{- include "downpour.podSecurity" . | nindent 8 }}
      {{- include "downpour.pullSecrets" . | nindent 6 }}
      {{- with .Values.runner.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .Values.runner.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      containers:
        - name: runner
          image: {{ .Values.images.driver }}
          imagePullPolicy: {{ .Values.imagePullPolicy }}
          command: [sh, -euc, 'exec downpour run-attempt "$1" >> "$2" 2>&1', runner]
          env:
            {{- include "downpour.rayEnv" . | nindent 12 }}
            - {name: DOWNPOUR_HOME, value: /srv/downpour}
            - {name: SPARK_CONF_DIR, value: /etc/downpour/spark}
            - {name: PYSPARK_PYTHON, value: /opt/downpour/bin/python}
            - {name: TMPDIR, value: /tmp}
            - name: POD_NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            # A pod's name does not resolve for others: executors get its address.
            - name: SPARK_LOCAL_IP
              valueFrom: {fieldRef: {fieldPath: status.podIP}}
          {{- with .Values.runner.envFromSecrets }}
          envFrom:
          {{- range . }}
            - secretRef: {name: {{ . }}}
          {{- end }}
          {{- end }}
          resources: {{- toYaml .Values.runner.resources | nindent 12 }}
          securityContext: {{- include "downpour.containerSecurity" . | nindent 12 }}
          volumeMounts:
            - {name: home, mountPath: /srv/downpour}
            - {name: spark, mountPath: /etc/downpour/spark, readOnly: true}
            - {name: tmp, mountPath: /tmp}
            - {name: shm, mountPath: /dev/shm}
            {{- include "downpour.rayTlsMount" . | nindent 12 }}
      volumes:
        - name: home
          persistentVolumeClaim: {claimName: {{ .Release.Name }}-home}
        - name: spark
          configMap: {name: {{ .Release.Name }}-spark}
        - name: tmp
          emptyDir: {sizeLimit: 20Gi}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ .Values.runner.shmSize }}}
        {{- include "downpour.rayTlsVolume" . | nindent 8 }}
{{- end }}

{{- /* The pod of an executor, into which Spark puts its container, its ports and its environment. */}}
{{- define "downpour.executorPod" -}}
apiVersion: v1
kind: Pod
metadata:
  labels: {{- include "downpour.selector" (list . "executor") | nindent 4 }}
spec:
  automountServiceAccountToken: false
  securityContext: {{- include "downpour.podSecurity" . | nindent 4 }}
  {{- include "downpour.pullSecrets" . | nindent 2 }}
  {{- with .Values.spark.executor.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.spark.executor.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: executor
      image: {{ .Values.images.executor }}
      imagePullPolicy: {{ .Values.imagePullPolicy }}
      env:
        - {name: HOME, value: /tmp}
        - {name: TMPDIR, value: /tmp}
      # Spark replaces these by what spark-defaults.conf says of executors.
      resources:
        requests: {cpu: {{ .Values.spark.executor.cores | quote }}, memory: 2Gi}
        limits: {cpu: {{ .Values.spark.executor.cores | quote }}, memory: 2Gi}
      securityContext: {{- include "downpour.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: work, mountPath: /opt/spark/work-dir}
        - {name: shm, mountPath: /dev/shm}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 50Gi} # the spools of partitions
    - name: work
      emptyDir: {sizeLimit: 1Gi}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ .Values.spark.executor.shmSize }}}
{{- end }}
