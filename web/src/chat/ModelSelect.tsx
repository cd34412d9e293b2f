import { useModels } from "../api/models";
import styles from "./ModelSelect.module.css";

interface Props {
  id?: string;
  value: string;
  onChange: (model: string) => void;
}

/** Chooses the model; "" is the server's default. A model that is gone stays in the list, marked. */
export function ModelSelect({ id, value, onChange }: Props) {
  const models = useModels().data;
  const isGone = value !== "" && models !== undefined && !models.some((model) => model.id === value);
  return (
    <select
      id={id}
      className={styles.select}
      aria-label="Model"
      value={value}
      onChange={(event) => onChange(event.target.value)}
    >
      <option value="">Default model</option>
      {(models ?? []).map((model) => (
        <option key={model.id}>{model.id}</option>
      ))}
      {models === undefined && value !== "" && <option>{value}</option>}
      {isGone && <option value={value}>{value} (not here)</option>}
    </select>
  );
}
