{{/* Probes and the hook of a container. The dashboard agent on port 52365 answers for the raylet, and on the head for
the GCS too, without Ray's token. */}}
{{- define "raydix.probes" -}}
startupProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 150
livenessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 120
  # A container that hangs has nothing to drain.
  terminationGracePeriodSeconds: 30
{{- if eq .role "head" }}
readinessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 10
# A cluster is deleted whole: the head outlives the workers' last streams.
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ (include "raydix.times" .root | fromJson).drain | quote }}]
{{- else }}
{{- include "raydix.workerReadiness" . }}
{{- include "raydix.drainHook" . }}
{{- end }}
{{- end }}

{{/* KubeRay's Service sends requests to every ready pod, so ready means that its HAProxy serves, too. The chart's own
Service finds the ingress pods of an upgrade's second cluster: these wait until that cluster has answered once. Later
they stay ready while no worker is, and clients wait instead of being refused. */}}
{{- define "raydix.workerReadiness" }}
readinessProbe:
  exec:
    command:
      - bash
      - -c
      - >-
        wget -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success &&
        wget -T 5 -q -O- http://localhost:8000/-/healthz | grep success
        {{- if eq .role "ingress" }} &&
        { [ -e /tmp/raydix-has-served ] ||
        { wget -T 5 -q -O- http://localhost:8000/health && touch /tmp/raydix-has-served; }; }
        {{- end }}
  periodSeconds: 5
  timeoutSeconds: {{ ternary 15 10 (eq .role "ingress") }}
  failureThreshold: 1
{{- end }}

{{/* Serve starts replacements elsewhere, then stops the replicas here; the node exits when it is empty. If the cluster's
head is gone there is nothing to wait for. */}}
{{- define "raydix.drainHook" }}
{{- $drain := (include "raydix.times" .root | fromJson).drain }}
lifecycle:
  preStop:
    exec:
      command:
        - bash
        - -c
        - >-
          timeout -k 5 30 ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION
          --reason-message "the pod is being deleted" --deadline-remaining-seconds {{ $drain }}
          && sleep {{ $drain }}
{{- end }}
