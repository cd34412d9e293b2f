import { useServerInfo } from "../api/manage";
import { nameModel, useModels } from "../api/models";
import styles from "./ModelSelect.module.css";

interface Props {
  id?: string;
  value: string;
  onChange: (model: string) => void;
}

/** Chooses the model; "" is the server's default. A model that is gone stays in the list, marked. */
export function ModelSelect({ id, value, onChange }: Props) {
  const models = useModels().data;
  const usual = useServerInfo().data?.default_model;
  const isGone = value !== "" && models !== undefined && !models.some((model) => model.id === value);
  return (
    <select
      id={id}
      className={styles.select}
      aria-label="Model"
      value={value}
      onChange={(event) => onChange(event.target.value)}
    >
      <option value="">{usual ? `${nameModel(usual)} (default)` : "Default model"}</option>
      {(models ?? []).map((model) => (
        <option key={model.id} value={model.id}>
          {nameModel(model.id)}
        </option>
      ))}
      {models === undefined && value !== "" && <option>{value}</option>}
      {isGone && <option value={value}>{value} (not here)</option>}
    </select>
  );
}
