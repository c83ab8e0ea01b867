// The types that Grafana publishes of a dashboard in which every panel is a time series.
import type { Dashboard, Panel } from '@grafana/schema';
import type {
  FieldConfig,
  Options,
} from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// JSON has the values of Grafana's enumerations, not their names.
type Plain<T> = T extends string ? `${T}` : T extends object ? { [Key in keyof T]: Plain<T[Key]> } : T;
// Grafana completes a panel's options by their defaults.
type Partly<T> = T extends object ? { [Key in keyof T]?: Partly<T[Key]> } : T;
type TimeSeries = Omit<Panel<Options, FieldConfig>, 'type' | 'options'> & { type: 'timeseries'; options: Partly<Options> };

export type Written = Plain<Omit<Dashboard, 'panels'> & { panels: TimeSeries[] }>;
