import { useSampling } from "../api/sampling";
import { CheckField } from "../ui/Field";
import { SelectField } from "../ui/SelectField";
import { changeSettings } from "./library";
import { NumberInput } from "./NumberInput";
import { PresetPicker } from "./PresetPicker";
import styles from "./SettingsPanel.module.css";
import { NUMBERS, readSchema } from "./settings";
import { TextSetting } from "./TextSetting";
import { ToolsSettings } from "./ToolsSettings";
import type { Conversation, Settings } from "./types";

const EFFORTS: Record<Settings["reasoning"], string> = {
  "": "Default",
  none: "Off",
  low: "Low",
  medium: "Medium",
  high: "High",
};

/** How answers of this conversation are made. A change holds from the next answer on. */
export function SettingsPanel({ conversation }: { conversation: Conversation }) {
  const { id, settings } = conversation;
  const usual = useSampling(settings.model);
  const change = (part: Partial<Settings>) => changeSettings(id, part);
  return (
    <div className={styles.panel}>
      <h2>Settings of this conversation</h2>
      <PresetPicker settings={settings} onChange={change} />
      <TextSetting
        label="System prompt"
        hint="What the model is told before the conversation."
        rows={4}
        value={settings.system}
        onChange={(system) => change({ system })}
      />
      <fieldset className={styles.numbers}>
        <legend>Sampling</legend>
        {NUMBERS.map((field) => (
          <NumberInput
            key={field.key}
            field={field}
            value={settings[field.key]}
            usual={usual[field.wire]}
            onChange={(value) => change({ [field.key]: value })}
          />
        ))}
      </fieldset>
      <SelectField
        label="Thinking"
        choices={EFFORTS}
        value={settings.reasoning}
        onChange={(reasoning) => change({ reasoning })}
      />
      <TextSetting
        label="Stop sequences"
        hint="The answer ends before one of these texts; one a line."
        rows={2}
        value={settings.stop}
        onChange={(stop) => change({ stop })}
      />
      <TextSetting
        label="JSON schema of the answer"
        hint="The answer keeps to it, token by token. Empty: any text."
        rows={4}
        code
        check={(text) => asProblem(readSchema(text))}
        value={settings.schema}
        onChange={(schema) => change({ schema })}
      />
      <CheckField
        label="Continue as text, without the chat template"
        checked={settings.asText}
        onChange={(asText) => change({ asText })}
      />
      <ToolsSettings settings={settings} onChange={change} />
    </div>
  );
}

function asProblem(read: unknown): string | null {
  return typeof read === "string" ? read : null;
}
