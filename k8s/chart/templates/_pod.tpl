{{/* The pod template of a group. Arguments: root, role (head, ingress or a pool's), pool (its values). */}}
{{- define "raydix.pod" -}}
{{- $v := .root.Values }}
{{- $head := eq .role "head" }}
{{- $own := include "raydix.podValues" . | fromJson }}
metadata:
  labels:
    {{- include "raydix.labels" .root | nindent 4 }}
    raydix-role: {{ .role }}
  {{- with $own.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  terminationGracePeriodSeconds: {{ (include "raydix.times" .root | fromJson).grace }}
  enableServiceLinks: false
  {{- with $own.serviceAccount }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- with $own.priorityClass }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if not $head }}
  automountServiceAccountToken: false
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 100
    fsGroup: 100
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .pool.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pool.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $v.topologySpread (not $head) }}
  {{- include "raydix.spread" . | nindent 2 }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" $head }}
      image: {{ include "raydix.image" .root }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      securityContext:
        {{- include "raydix.containerSecurity" . | nindent 8 }}
      ports:
        {{- if $head }}
        - {name: gcs, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- end }}
        - {name: serve, containerPort: 8000}
        - {name: metrics, containerPort: 8080}
      env:
        {{- include "raydix.env" . | trim | nindent 8 }}
        {{- with $own.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if not $head }}
      envFrom:
        - secretRef: {name: {{ $v.envSecret }}, optional: true}
      {{- end }}
      resources:
        {{- include "raydix.resources" . | trim | nindent 8 }}
      volumeMounts:
        {{- include "raydix.mounts" . | trim | nindent 8 }}
        {{- with $own.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- include "raydix.probes" . | trim | nindent 6 }}
  volumes:
    {{- include "raydix.volumes" . | trim | nindent 4 }}
    {{- with $own.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* What the values `pod` add to a group's pods: those of all groups and then the group's own, whose annotations, service
account and priority class come before the others. */}}
{{- define "raydix.podValues" -}}
{{- $all := .root.Values.pod }}
{{- $own := .pool.pod | default dict }}
{{- $annotations := dict }}
{{- if not .root.Values.safeToEvict }}
{{- $annotations = dict "cluster-autoscaler.kubernetes.io/safe-to-evict" "false" "karpenter.sh/do-not-disrupt" "true" }}
{{- end }}
{{- $found := dict "annotations" (mergeOverwrite $annotations (deepCopy ($all.annotations | default dict)) (deepCopy ($own.annotations | default dict))) }}
{{- range $key := list "env" "volumes" "volumeMounts" }}
{{- $_ := set $found $key (concat (get $all $key | default list) (get $own $key | default list)) }}
{{- end }}
{{- range $key := list "serviceAccount" "priorityClass" }}
{{- $_ := set $found $key (get $own $key | default (get $all $key)) }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{- define "raydix.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Pods of a group on different nodes and zones where there are such; clusters of an upgrade are counted apart. */}}
{{- define "raydix.spread" -}}
topologySpreadConstraints:
  {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "raydix.labels" $.root | nindent 8 }}
        raydix-role: {{ $.role }}
    matchLabelKeys: [ray.io/cluster]
  {{- end }}
{{- end }}

{{/* Both HAProxy variables, or neither, in every Ray process. Whatever writes outside its volumes is told another place,
since the root file system is read-only. */}}
{{- define "raydix.env" -}}
{{- $times := include "raydix.times" .root | fromJson }}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_THROUGHPUT_OPTIMIZED, value: "1"}
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: {{ $times.stream | quote }}}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_object_manager_pull_timeout_ms, value: "1000"}
- {name: XDG_CACHE_HOME, value: /tmp/cache}
- {name: TRITON_CACHE_DIR, value: /tmp/cache/triton}
- {name: CUDA_CACHE_PATH, value: /tmp/cache/nv}
{{- if ne .role "head" }}
- {name: RAYDIX_CACHE, value: /var/lib/raydix/models}
- {name: HF_HOME, value: /var/lib/raydix/models/hf}
{{- end }}
{{- if gt (int (.pool.gpus | default 0)) 0 }}
# Exported KV lives in the object store; faulting its pages in at start keeps that off the requests.
- {name: RAY_preallocate_plasma_memory, value: "1"}
{{- end }}
{{- end }}

{{- define "raydix.resources" -}}
{{- $gpus := int (.pool.gpus | default 0) }}
{{- range $kind := list "requests" "limits" }}
{{ $kind }}:
  cpu: {{ $.pool.cpu | quote }}
  memory: {{ include "raydix.quantity" $.pool.memoryGib }}
  ephemeral-storage: {{ include "raydix.ephemeralGib" $ }}Gi
  {{- if gt $gpus 0 }}
  {{ $.root.Values.gpuResource }}: {{ $gpus | quote }}
  {{- end }}
{{- end }}
{{- end }}
