import { Save, Trash2 } from "lucide-react";
import { useState } from "react";
import { useStore } from "../lib/store";
import { Button, IconButton } from "../ui/Button";
import { Dialog } from "../ui/Dialog";
import { Field } from "../ui/Field";
import styles from "./PresetPicker.module.css";
import { BUILT_IN, deletePreset, findPreset, ownPresets, savePreset } from "./presets";
import type { Settings } from "./types";

interface Props {
  settings: Settings;
  onChange: (part: Partial<Settings>) => void;
}

/** Chooses settings by name, and keeps the present ones under a name. */
export function PresetPicker({ settings, onChange }: Props) {
  const own = useStore(ownPresets);
  const all = [...BUILT_IN, ...own];
  const current = findPreset(settings, all);
  const isOwn = current !== undefined && own.includes(current);
  const [naming, setNaming] = useState(false);
  return (
    <div className={styles.presets}>
      <Field label="Preset">
        {(ids) => (
          <select
            {...ids}
            value={current?.name ?? ""}
            onChange={(event) => {
              const chosen = all.find((preset) => preset.name === event.target.value);
              if (chosen) onChange(chosen.settings);
            }}
          >
            {!current && <option value="">Own settings</option>}
            {all.map((preset) => (
              <option key={preset.name}>{preset.name}</option>
            ))}
          </select>
        )}
      </Field>
      {isOwn ? (
        <IconButton label={`Delete the preset “${current.name}”`} onClick={() => deletePreset(current.name)}>
          <Trash2 />
        </IconButton>
      ) : (
        <IconButton label="Save as a preset" disabled={current !== undefined} onClick={() => setNaming(true)}>
          <Save />
        </IconButton>
      )}
      <NameDialog open={naming} onClose={() => setNaming(false)} onName={(name) => savePreset(name, settings)} />
    </div>
  );
}

function NameDialog({ open, onClose, onName }: { open: boolean; onClose: () => void; onName: (name: string) => void }) {
  const [name, setName] = useState("");
  const isTaken = BUILT_IN.some((preset) => preset.name === name.trim());
  const save = (event: React.FormEvent) => {
    event.preventDefault();
    if (!name.trim() || isTaken) return;
    onName(name.trim());
    setName("");
    onClose();
  };
  return (
    <Dialog open={open} title="Save as a preset" onClose={onClose}>
      <form onSubmit={save} className={styles.form}>
        <Field
          label="Name"
          hint="It keeps the system prompt, sampling, schema and tools. The model stays as it is."
          error={isTaken ? "A built-in preset has this name. Choose another one." : null}
        >
          {(ids) => <input {...ids} value={name} maxLength={60} onChange={(event) => setName(event.target.value)} />}
        </Field>
        <Button kind="primary" type="submit" disabled={!name.trim() || isTaken}>
          Save
        </Button>
      </form>
    </Dialog>
  );
}
