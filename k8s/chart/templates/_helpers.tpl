{{/* Labels by which every object of a release is found, and its pods. Pods keep KubeRay's app.kubernetes.io/name. */}}
{{- define "raydix.labels" -}}
app: raydix
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "raydix.image" -}}
{{- with .Values.image }}{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}{{ end }}
{{- end }}

{{/* The roles of the pools that compute, in order, as {"roles": [...]}. */}}
{{- define "raydix.roles" -}}
{{- $roles := list }}
{{- range $role := list "prefill" "decode" "mixed" "elastic" }}
{{- if (index $.Values.pools $role).enabled }}{{ $roles = append $roles $role }}{{ end }}
{{- end }}
{{- dict "roles" $roles | toJson }}
{{- end }}

{{/* Bounds of the number of a pool's workers, as {"min": ..., "max": ...}; the same for a fixed number. */}}
{{- define "raydix.numbers" -}}
{{- if kindIs "map" .replicas }}{{ toJson .replicas }}{{ else }}{{ dict "min" .replicas "max" .replicas | toJson }}{{ end }}
{{- end }}

{{/* The file of configs/ that the overrides are merged into. */}}
{{- define "raydix.config" -}}
{{- $split := .Values.pools.prefill.enabled }}
{{- $first := index .Values.pools (index (include "raydix.roles" . | fromJson).roles 0) }}
{{- $gpus := gt (int $first.gpus) 0 }}
{{- if $split }}{{ ternary "gpu_disaggregated" "cpu" $gpus }}{{ else }}{{ ternary "gpu_single" "cpu_mixed" $gpus }}{{ end }}
{{- end }}

{{/* Times, in seconds: each longer than the one before. */}}
{{- define "raydix.times" -}}
{{- $stream := int .Values.streamSeconds }}
{{- $worker := min $stream 120 | int }}
{{- $drain := add $stream 60 $worker }}
{{- dict "worker" $worker "stream" $stream "idle" (add $stream 60) "drain" $drain "grace" (add $drain 60) | toJson }}
{{- end }}

{{/* /dev/shm for an object store: what plasma takes besides, rounded up. */}}
{{- define "raydix.shmGib" -}}
{{- mulf (float64 .) 1.1 | ceil }}
{{- end }}

{{- define "raydix.bytes" -}}
{{- mulf (float64 .) 1073741824.0 | int64 }}
{{- end }}

{{/* A number of GiB as Kubernetes writes it. */}}
{{- define "raydix.quantity" -}}
{{- $mib := mulf (float64 .) 1024.0 | int64 }}
{{- if eq (mod $mib 1024) 0 }}{{ div $mib 1024 }}Gi{{ else }}{{ $mib }}Mi{{ end }}
{{- end }}

{{/* The volume for the disk tier, with room for what is being written. */}}
{{- define "raydix.diskGib" -}}
{{- mulf (float64 .Values.cache.diskGib) 1.1 | ceil }}
{{- end }}

{{/* Bytes on the node's disk that a pod may take, in GiB: its volumes that lie there, and 2 for logs of containers. */}}
{{- define "raydix.ephemeralGib" -}}
{{- $v := .root.Values.volumes }}
{{- $gib := addf 2.0 (float64 $v.tmpGib) }}
{{- if and (ne .role "head") (not (or $v.models.hostPath $v.models.claim)) }}
{{- $gib = addf $gib (float64 $v.models.gib) }}
{{- end }}
{{- if and (eq .role "ingress") .root.Values.cache.diskGib (not (or $v.disk.storageClass $v.disk.claim)) }}
{{- $gib = addf $gib (float64 (include "raydix.diskGib" .root)) }}
{{- end }}
{{- ceil $gib }}
{{- end }}
