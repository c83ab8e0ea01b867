{{/* What the chart's values are in raydix's configuration; `overrides` has the rest. */}}
{{- define "raydix.overrides" -}}
{{- $v := .Values }}
{{- $cache := dict "pool_gib" $v.cache.poolGib "segment_gib" $v.cache.segmentGib "swap_gib" $v.cache.swapGib "disk_gib" $v.cache.diskGib }}
{{- if $v.cache.diskGib }}{{ $_ := set $cache "disk_path" "/var/lib/raydix/kv" }}{{ end }}
{{- $batches := dict "gib" 0 }}
{{- if $v.volumes.batches.claim }}{{ $batches = dict "folder" "/var/lib/raydix/batches" }}{{ end }}
{{- $workers := dict }}
{{- range $role := (include "raydix.roles" . | fromJson).roles }}
{{- $pool := index $v.pools $role }}
{{- $numbers := include "raydix.numbers" $pool | fromJson }}
{{- $worker := dict "replicas" ($numbers.min | int) }}
{{- if eq $role "elastic" }}{{ $worker = dict "min_replicas" ($numbers.min | int) "max_replicas" ($numbers.max | int) }}{{ end }}
{{- if gt (int $pool.gpus) 0 }}
{{- $worker = merge $worker (dict "device" "cuda" "num_cpus" 1 "num_gpus" $pool.gpus) }}
{{- else }}
{{- $worker = merge $worker (dict "device" "cpu" "num_threads" (max 1 (floor $pool.cpu | int))) }}
{{- end }}
{{- $_ := set $workers $role (mergeOverwrite $worker (deepCopy $pool.worker)) }}
{{- end }}
{{- $derived := dict "model" (dict "name" $v.model.name "source" $v.model.source) "cache" $cache "batches" $batches }}
{{- $all := mergeOverwrite (deepCopy $v.overrides) $derived }}
{{- /* The file that these are merged into has mixed workers where there is no prefill pool. */ -}}
{{- if not (or $v.pools.prefill.enabled $v.pools.mixed.enabled) }}{{ $_ := set $workers "mixed" nil }}{{ end }}
{{- set $all "workers" $workers | toYaml }}
{{- end }}

{{/* The Serve config: each deployment, and the pods that its replicas go to. */}}
{{- define "raydix.serveConfig" -}}
{{- $v := .Values }}
{{- $times := include "raydix.times" . | fromJson }}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
applications:
  - name: raydix
    import_path: serve_app:build
    route_prefix: /
    args:
      config: {{ include "raydix.config" . }}
      {{- if $v.tenants.secret }}
      files:
        - /etc/raydix/tenants/tenants.yaml
      {{- end }}
      overrides:
        {{- include "raydix.overrides" . | nindent 8 }}
    runtime_env:
      env_vars:
        TOKENIZERS_PARALLELISM: "false"
    deployments:
      - name: kv_cache_manager
        num_replicas: 1
        placement_group_bundles:
          - CPU: {{ $v.pools.ingress.managerCpu }}
        placement_group_bundle_label_selector:
          - raydix-role: ingress
        graceful_shutdown_timeout_s: {{ $times.worker }}
      {{- range $role := (include "raydix.roles" . | fromJson).roles }}
      {{- $pool := index $v.pools $role }}
      - name: {{ $role }}
        {{- if ne $role "elastic" }}
        num_replicas: {{ $pool.replicas }}
        {{- end }}
        placement_group_bundles:
          {{- if gt (int $pool.gpus) 0 }}
          - CPU: 2
            GPU: {{ $pool.gpus }}
          {{- else }}
          - CPU: {{ ceil $pool.cpu }}
          {{- end }}
        placement_group_bundle_label_selector:
          - raydix-role: {{ $role }}
        graceful_shutdown_timeout_s: {{ $times.worker }}
      {{- end }}
      - name: ingress
        num_replicas: auto
        autoscaling_config:
          min_replicas: {{ $v.pools.ingress.replicas.min }}
          max_replicas: {{ $v.pools.ingress.replicas.max }}
          target_ongoing_requests: {{ $v.pools.ingress.replicas.target }}
        ray_actor_options:
          num_cpus: {{ $v.pools.ingress.replicaCpu }}
          label_selector:
            raydix-role: ingress
        graceful_shutdown_timeout_s: {{ $times.stream }}
{{- end }}
