import { CheckField, Field } from "../ui/Field";
import { SelectField } from "../ui/SelectField";
import { readTools } from "./settings";
import { TextSetting } from "./TextSetting";
import styles from "./ToolsSettings.module.css";
import { readUrl } from "./tools";
import type { Settings, ToolUrl } from "./types";

const CHOICES: Record<Settings["toolChoice"], string> = {
  auto: "The model decides",
  required: "It must call one",
  none: "It calls none",
};

const EXAMPLE = `[{
  "name": "get_weather",
  "description": "The weather of a city",
  "parameters": {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"]
  }
}]`;

/** The tools that the model may call, and who answers the calls. */
export function ToolsSettings({
  settings,
  onChange,
}: {
  settings: Settings;
  onChange: (part: Partial<Settings>) => void;
}) {
  const tools = readTools(settings.tools);
  const names = typeof tools === "string" ? [] : tools.map((tool) => tool.function.name);
  const setUrl = (name: string, url: ToolUrl) => onChange({ toolUrls: { ...settings.toolUrls, [name]: url } });
  return (
    <section className={styles.tools} aria-label="Tools and who answers them">
      <TextSetting
        label="Tools"
        hint="A JSON list of functions, as OpenAI's clients send them. You type a call's result, or an address answers it."
        rows={6}
        code
        placeholder={EXAMPLE}
        check={(text) => {
          const read = readTools(text);
          return typeof read === "string" ? read : null;
        }}
        value={settings.tools}
        onChange={(text) => onChange({ tools: text })}
      />
      {names.length > 0 && (
        <SelectField
          label="Calls"
          choices={CHOICES}
          value={settings.toolChoice}
          onChange={(toolChoice) => onChange({ toolChoice })}
        />
      )}
      {names.map((name) => (
        <UrlField key={name} name={name} value={settings.toolUrls[name]} onChange={(url) => setUrl(name, url)} />
      ))}
    </section>
  );
}

interface UrlProps {
  name: string;
  value: ToolUrl | undefined;
  onChange: (url: ToolUrl) => void;
}

/** The address that may get a tool's calls. Writing it allows it; calls go there by themselves only if that is ticked. */
function UrlField({ name, value = { url: "", automatic: false }, onChange }: UrlProps) {
  const read = value.url ? readUrl(value.url) : null;
  return (
    <div className={styles.url}>
      <Field
        label={`Address that answers ${name}`}
        hint="It gets the arguments as a POST of JSON, and answers with the result. Empty: you type the result."
        error={typeof read === "string" ? read : null}
      >
        {(ids) => (
          <input
            {...ids}
            type="url"
            placeholder="http://127.0.0.1:9000/tool"
            value={value.url}
            onChange={(event) => onChange({ url: event.target.value.trim(), automatic: false })}
          />
        )}
      </Field>
      {value.url && typeof read !== "string" && (
        <CheckField
          label="Send calls there without asking me"
          checked={value.automatic}
          onChange={(automatic) => onChange({ ...value, automatic })}
        />
      )}
    </div>
  );
}
