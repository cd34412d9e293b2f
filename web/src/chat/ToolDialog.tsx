import { Plus, X } from "lucide-react";
import { useState } from "react";
import { Button, IconButton } from "../ui/Button";
import { Dialog, DialogForm } from "../ui/Dialog";
import { CheckField, Field } from "../ui/Field";
import { SelectField } from "../ui/SelectField";
import type { ToolDefinition } from "./settings";
import styles from "./ToolsSettings.module.css";
import { checkName, type Parameter, type ToolForm, TYPES, writeForm } from "./toolForm";

interface Props {
  form: ToolForm;
  /** Names that other tools have. */
  taken: readonly string[];
  onSave: (tool: ToolDefinition) => void;
  onClose: () => void;
}

const NEW: Parameter = { name: "", type: "string", description: "", required: true };

/** Asks what a tool is called, what it does and which parameters it has. */
export function ToolDialog({ form: given, taken, onSave, onClose }: Props) {
  const [form, setForm] = useState(given);
  const problem = form.name ? checkName(form.name, taken) : null;
  const change = (part: Partial<ToolForm>) => setForm({ ...form, ...part });
  const changeParameter = (index: number, part: Partial<Parameter>) =>
    change({ parameters: form.parameters.map((one, at) => (at === index ? { ...one, ...part } : one)) });
  const save = () => {
    if (!form.name.trim() || problem) return;
    onSave(writeForm(form));
    onClose();
  };
  return (
    <Dialog open title={given.name ? `Edit ${given.name}` : "Add a tool"} onClose={onClose}>
      <DialogForm onSubmit={save}>
        <Field label="Name of the tool" error={problem}>
          {(ids) => (
            <input
              {...ids}
              value={form.name}
              placeholder="get_weather"
              spellCheck={false}
              onChange={(event) => change({ name: event.target.value })}
            />
          )}
        </Field>
        <Field label="What it does" hint="The model reads this to decide when to call it.">
          {(ids) => (
            <textarea
              {...ids}
              rows={2}
              value={form.description}
              onChange={(event) => change({ description: event.target.value })}
            />
          )}
        </Field>
        {form.parameters.map((parameter, index) => (
          <fieldset
            // biome-ignore lint/suspicious/noArrayIndexKey: a parameter has no other name while it is typed.
            key={index}
            className={styles.parameter}
          >
            <legend>Parameter {index + 1}</legend>
            <Field label="Name">
              {(ids) => (
                <input
                  {...ids}
                  value={parameter.name}
                  spellCheck={false}
                  onChange={(event) => changeParameter(index, { name: event.target.value })}
                />
              )}
            </Field>
            <SelectField
              label="Type"
              choices={TYPES}
              value={parameter.type}
              onChange={(type) => changeParameter(index, { type })}
            />
            <div className={styles.whole}>
              <Field label="Description">
                {(ids) => (
                  <input
                    {...ids}
                    value={parameter.description}
                    onChange={(event) => changeParameter(index, { description: event.target.value })}
                  />
                )}
              </Field>
            </div>
            <CheckField
              label="Required"
              checked={parameter.required}
              onChange={(required) => changeParameter(index, { required })}
            />
            <IconButton
              small
              label={`Remove parameter ${index + 1}`}
              onClick={() => change({ parameters: form.parameters.filter((_, at) => at !== index) })}
            >
              <X />
            </IconButton>
          </fieldset>
        ))}
        <div>
          <Button onClick={() => change({ parameters: [...form.parameters, NEW] })}>
            <Plus /> Add a parameter
          </Button>
        </div>
        <Button kind="primary" type="submit" disabled={!form.name.trim() || problem !== null}>
          Save the tool
        </Button>
      </DialogForm>
    </Dialog>
  );
}
